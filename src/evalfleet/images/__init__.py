"""A few files out of a container image, from an archive or a registry, without unpacking it anywhere.

Images are large and come from anywhere: everything is streamed, and whatever a header claims is bounded.
"""
