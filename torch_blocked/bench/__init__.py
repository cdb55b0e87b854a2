"""Benchmarks of whole models: `python -m torch_blocked bench`.

models/       what is timed
inference.py  the command: builds, verifies, times and reports each model in each format
fold.py       folds batch norms into convolutions
measure.py    interleaved timing and its statistics, for any set of functions
report.py     text table, JSON and CSV
"""
