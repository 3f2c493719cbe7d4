"""The runtime executes plans: collectives, generated programs, workers and state. It plans nothing.

Rooms, each importing only those above it:

    flight                  what each rank did last
    groups                  groups of ranks and their primitives; every call is recorded
    collectives | lowered   differentiable moves and stage messages | operators over sharded dims
    execute | launch        one training step of one rank | workers: processes or threads
    tensors                 a parameter as users hold it: a whole tensor, of which ranks keep shards
    storage                 checkpoints on disk: checksums, boxes of tensors, folders
    state                   weights, state dicts and the gradient norm
    checkpoints             what a training run saves, loaded whole or not at all
"""
