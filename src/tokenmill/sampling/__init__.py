"""From logits to ids: batched over rows, each row with its own parameters, key and rules. Needs torch."""
