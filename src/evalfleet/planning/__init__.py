"""From what a user asks for to a plan: flags, configuration, plug-ins, and what earlier runs tell."""
