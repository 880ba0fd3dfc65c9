"""The tiers a record can be in, one module each."""
