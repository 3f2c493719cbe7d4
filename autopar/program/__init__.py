"""The program as data: a wing that exports nothing.

Rooms: `graph` (what was captured), `lines` (what a rank runs), `communication` (who communicates
what, and when).
"""
