"""Distributed training against two truths.

First truth, the library on the phantom GPU: torch's `fully_shard` and the rest run as one rank of any world over a
process group without peers. What is predicted comes from there, so these tests cannot doubt it.

Second truth, small real runs: two or four processes on this machine's CPU with gloo between them train tiny models
under the same library, and every storage of each process is watched by weak references and by a hook on
`UntypedStorage.resize_` (real_ranks.py and real_techniques.py, which share no code with metapeak). Live bytes of a rank
have to equal the prediction for that rank at the end of every phase, and so does the peak of every phase.

What gloo does and NCCL does not, and how the comparison keeps it out:
* its thread lets go of a collective's tensors a little after the caller goes on: one thread, and a second collective
  after each that is watched (real_ranks.py, OneThread);
* a reduce-scatter reduces a clone of its input: views make no storage, and nothing else of that clone is seen.
  Averages of float32 and bfloat16 are the collective's own on CPU, CUDA and the phantom GPU, without a division.
* AdamW's `step` and its scalars are on the host on both sides and are not counted.
* the CPU has no memory-efficient attention as the ring of context parallelism asks for: results of that kernel are
  zeros of the sizes that its meta kernel has. What the ring keeps and sends is torch's own.
* A router chooses by values: on the CPU it chooses every expert equally often, as the prediction assumes.
The end of a phase is where the next operation begins: FSDP1 with `use_orig_params` holds the sharded gradients through
`zero_grad(set_to_none=True)` and drops them when the next forward starts, on gloo as on the phantom GPU.

The rewrite of FSDP2 (strategies/parallel/fsdp2_rewrite.py) is not the library: the first truth is its oracle, at every
operation (test_fsdp2_rewrite.py).
"""
