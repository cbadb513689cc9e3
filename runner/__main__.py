from meshrunner.__main__ import main

main()
