"""A run as the dashboard shows it: its fold, the tables and figures made of it, and what is kept of them."""
