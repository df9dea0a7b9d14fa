"""The device as the driver and PyTorch's CUDA caching allocator see it: plain integers, no torch.

allocator_config.py   the settings of PYTORCH_CUDA_ALLOC_CONF
address_space.py      what answers when the allocator asks the driver for memory, and at which addresses
allocator.py          the caching allocator: blocks, segments, pools
reserve.py            a Liveness through the allocator: allocated and reserved bytes, events, segments
snapshot_reader.py    recorded memory snapshots, read without running anything they hold
replay.py             a recorded history through the allocator, compared request by request
"""
