"""What is kept, for how long, and how an operator steers it."""
