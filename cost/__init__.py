"""What a training step costs: seconds and bytes. Nothing here chooses a plan.

The rooms, in the order to read them:
hardware     profiles of devices and links      laws        seconds of collectives and operators
memory       bytes and peaks of a stage         simulate    a schedule of given times, simulated
price        the cost of a pipeline program     transformer a step from dims alone, without a graph
published    predictions beside published runs
Higher rooms may import lower ones: `published`; then `price` and `transformer`; then `laws`,
`memory` and `simulate`; then `hardware`. This wing exports nothing: import from its rooms.
"""
