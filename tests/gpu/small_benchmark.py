"""`benchmarks/copy_gpu.py` with little of everything: that it runs, not what it measures."""

import sys

from fake_gpu import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import copy_gpu

copy_gpu.POOL_BYTES, copy_gpu.LAYERS, copy_gpu.TURNS, copy_gpu.MATRIX = 8 << 20, 3, 1, 64
copy_gpu.BLOCKS = (1, 10, 2000)
copy_gpu.ROWS = {row: copy_gpu.ROWS[row] for row in (*copy_gpu.BESIDE, "41 + 8.25 KB")}
copy_gpu.save = lambda name, result: print(name, result["gpu"], len(result["rates"]), ",".join(result["live"]))

copy_gpu.main()
