"""`torch-blocked bench {models, layers, train, memory, compare, plot}`: what a user measures.

What only this project measures, such as single convolutions, dispatch and other engines, is in the
repository's folder benchmarks.

models.py     what is timed: a user's module:factory, or a network of networks/
packages.py   or one that timm, torchvision or pytorchcv has under a name
inference.py  whole models in each format, and optimized
by_layer.py   where a model's time goes, layer by layer and format by format
train.py      training steps: forward, backward and SGD
memory.py     what a process holds that runs a model
compare.py    two JSON files of the same benchmark
pictures.py   a JSON file as a picture
time_bars.py  the times of records as bars
plot.py       marks of relative speeds and bars of times, as SVG
fold.py       folds batch norms into convolutions
measure.py    interleaved timing and its statistics, for any set of functions
arguments.py  types and options that several commands share
report.py     the circumstances of a run, progress, JSON and CSV
"""
