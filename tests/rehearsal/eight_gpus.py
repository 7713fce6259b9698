"""A plugin of pytest for a machine without a GPU: the driver seems to know eight."""

import torch

torch.cuda.device_count = lambda: 8
