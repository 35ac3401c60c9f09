"""From parameters to draws: each row with its own parameters, key and rules. Imports no torch."""
