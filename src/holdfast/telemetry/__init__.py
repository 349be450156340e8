"""Events and what they tell."""
