"""How much accuracy each group of layers costs, and what is chosen from that."""
