"""What the stand-ins for clouds share: time, hosts of the lab as machines, what would be billed, and TLS."""
