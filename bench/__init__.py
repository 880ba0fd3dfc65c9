"""`aio_bench`: what the I/O engine gets out of a drive; `step_bench`: what a training step costs.

`aio_bench`, in the order of a measurement: `sizes` (text to bytes), `job` (what is to be done),
`buffers` (from which memory), `lane` (on which file, through which engine), `workload` (one timed
window), `verification` (is it all there), `facts` (on what machine), `report` (tables and JSON);
and the commands: `run`; `sweep` with `plot` and `config_file`; `compare` and `small`, both a
`contest` with `rivals`, which are `fio_baseline`, and `deepnvme` with `deepnvme_child`; `table`, of
many comparisons; `aio_bench` reads the command line.

`step_bench` reads its own; its parts are in `steps`. `link` and `collectives` are commands by
themselves, on the way from host memory to a GPU, and from rank to rank. DeepSpeed's interpreter
imports this package to run one of them, so nothing is imported here.
"""
