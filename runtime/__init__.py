"""The runtime executes plans: collectives, generated programs, workers and state. It plans nothing.

Rooms, each importing only those above it:

    groups                  groups of ranks and their primitives; every call is recorded
    collectives | lowered   differentiable moves and stage messages | operators over sharded dims
    execute | launch        one training step of one rank | workers: processes or threads
    state                   weights, state dicts, checkpoints and the gradient norm
"""
