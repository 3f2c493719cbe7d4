"""A transformer's training step from its dims and a recipe, without a captured graph.

shape       dims and parameters            configs   shapes from Hugging Face configs
recipe      how it is laid out, with what software
work        kernels and collectives        layer     the items of one layer
ends        embedding, logits, loss        chunks    which layers and parameters are where
machine     seconds of items; where groups stand
memory      bytes on a rank                state     what a parameter keeps; its update
orders      schedules                      estimate  a step: stage times, simulated
scaling     the same recipe on more devices
"""
