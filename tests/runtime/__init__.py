"""Collectives, schedules, state and launch, on threads and on processes."""
