"""Settings that every test shares."""

import torch

torch.set_num_threads(1)  # the batches here are far too small to pay for a thread pool
