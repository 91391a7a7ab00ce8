"""Many peers' tensors become one."""
