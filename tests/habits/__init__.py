"""What people write in training scripts, each line proved on two ranks: it works, or is refused.

`table.py` is the list and how a habit runs; the other files hold the habits, one room of a script
each; `page.py` writes docs/habits.md from them.
"""
