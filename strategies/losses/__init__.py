"""How hidden states become a loss, one file per family. They import torch; loss.py imports them late."""
