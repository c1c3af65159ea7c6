"""Measurements: how fast each backend is on this machine, beside what others' libraries reach by themselves.

`harness` times anything; the rest is about attention: a grid of cells in a file (`grid`), what is timed
(`ours`, `peers_*`), the run (`engine`, `run`), what is told of it (`document`, `summary`, `plot`).
`anyattn bench` is the command.
"""
