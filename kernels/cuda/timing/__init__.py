"""What `bench kernels --backend cuda` measures: every op on this GPU against its copy bandwidth.

Invariant: there is one way to time (`timer.Timer`): calls captured in a graph, inputs rotated
through more than the L2, what is compared replayed in turns, medians with their range. The bits of
what is timed are checked first. Weights and activations are random; sizes are a model's.

An op is a function that yields `entry.Entry` objects for some `entry.Sizes`; `registry.py` lists
them, `report.py` runs them. `slice.py` runs the code of an Orin (sm_87) on as many multiprocessors
as an Orin has, where bytes per clock say what its instructions allow.

Importing this package needs neither torch nor Triton.
"""
