"""The parts of `step_bench`: a whole training step, ours and others', each run in its own process.

What runs in a child: `model` (what is trained), `wire` (what a child is told and what it tells),
`loop` (the measured steps), and one module an engine: `child_ours`, `child_torch`,
`child_deepspeed`. The last one, `model`, `wire`, `loop`, `timeline` (the picture of a step) and
`link` need nothing but torch and the standard library, because DeepSpeed's interpreter has none of
our packages. `child_device` and `link` find out what a GPU gives.

What runs in the parent: `contestants` (how a run is set up), `launch` (its processes, one a rank),
`ranks` (what they measured, as one), `drive` and `device` (what the drive and the GPU give),
`ideal` (what a step could take at best), `measure` (who runs when), `report`, `plot`,
`timeline_plot`.
"""
