"""One thread for the tiny tensors of the tests: on shared cores, waiting for other threads outlasts the work."""

import torch

torch.set_num_threads(1)
