"""How commands get onto one machine and files come back."""
