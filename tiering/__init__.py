"""A tensor store over three tiers."""
