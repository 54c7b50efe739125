"""What works here and what does not: this machine for reading traces, and the hosts of the settings for making them."""
