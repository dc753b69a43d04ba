"""Files of tools that show time lines and stacks: Chrome's trace format, speedscope's. Know events, not plans."""
