"""Distributed training against two truths.

First truth, the library on the phantom GPU: torch's `fully_shard` and the rest run as one rank of any world over a
process group without peers. What is predicted comes from there, so these tests cannot doubt it.

Second truth, small real runs: two or four processes on this machine's CPU with gloo between them train tiny models
under the same library, and every storage of each process is watched by weak references and by a hook on
`UntypedStorage.resize_` (real_ranks.py, which shares no code with metapeak). Live bytes of a rank have to equal the
prediction for that rank at the end of every phase, and so does the peak of every phase where CPU and GPU run the same
operations. Where they do not, the case says which mechanism differs (cases.py).
"""
