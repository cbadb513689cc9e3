from meshrunner.runner.cli import main

main()
