"""The forkserver's first import: it turns off garbage collection, which would take 0.5 s of the 2.2 s of importing torch."""

import gc

gc.disable()
