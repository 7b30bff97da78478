"""How calls are timed in turns, how peak memory is measured, and what this machine can do.

`regard.timing.measurement` times and needs no torch; `regard.timing.machine` describes the machine.
`regard compare`, `regard cost`, the benchmarks and the experiments share them.
"""
