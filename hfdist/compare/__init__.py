"""`hfdist compare`: one unmodified script under several engines, side by side and honest.

command.py       the command: reads, runs, shows
engines.py       which engines there are, and the yaml and environment each one is launched with
launches.py      one `accelerate launch` in the background: time limit, its end, its own error text
start.py         the first process of a launch: ends with its parent; a network namespace, if asked
child.py         what runs in every rank: the script, with the engine's Accelerator and a probe in it
probe.py         what is measured in a rank, per optimizer step
peers.py         accelerate's DeepSpeed and DDP, and bare `fully_shard`, as Accelerators a script can use
one_process.py   one process with the global batch of W ranks
ops.py           DeepSpeed's ops, built once in a process of their own
session.py       all launches of a comparison, in turn, and compare.json
figures.py       pure: from raw samples to the numbers that are shown
table.py         the terminal's table
plot.py          the picture
"""
