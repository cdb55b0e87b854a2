"""Benchmarks of whole models, `python -m torch_blocked bench`, of layers, `... bench conv`, of
training steps, `... bench train`, and of the way from an op to its kernel, `... bench dispatch`.

models/       what is timed
inference.py  the command: builds, verifies, times and reports each model in each format
convolution.py  the command `bench conv`: the convolutions of layers.py, ours against torch's
train.py      the command `bench train`: forward, backward and SGD, ours against torch's
dispatch.py   the command `bench dispatch`: what a small op costs beyond its kernel
layers.py     the convolutions of well-known models, as data
fold.py       folds batch norms into convolutions
measure.py    interleaved timing and its statistics, for any set of functions
report.py     text table, JSON and CSV
"""
