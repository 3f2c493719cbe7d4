"""What things cost: hardware profiles, collectives, operators and memory. Plans nothing."""
