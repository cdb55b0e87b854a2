"""The table of third-party models and what benchmarks/third_party.py does with a row of it."""

from zoo import convnets, diffusion, hugging, medical, others, vision

ROWS = (*medical.ROWS, *diffusion.ROWS, *hugging.ROWS, *convnets.ROWS, *others.ROWS, *vision.ROWS)
