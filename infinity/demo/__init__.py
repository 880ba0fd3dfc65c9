"""Train a small GPT whose states live on the drive: ``python -m infinity.demo --help``.

`corpus` is the text, `model` a plain torch module that knows nothing of the engine, `options` the
command line, `train` the loop, `probe` measures the drive and the processor, `report` says how the
run went, and ``__main__`` puts them together.
"""
