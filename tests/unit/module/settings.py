"""A user's module of settings, which a loss reads while tests change them."""

GAMMA = 1.0
DELTA = 1.0


class Choice:
    weight = 1.0
