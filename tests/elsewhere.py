"""A device whose memory is apart from the host's, without one: what is brought there and back is copied and counted."""

import torch

from holdfast.devices.device import Host


class Elsewhere(Host):
    """The host's processor. A tensor that was brought is another one, whose name on the device is kept."""

    def __init__(self):
        super().__init__()
        self.here, self.there, self.asked_for = 0, 0, 0

    def memory(self, size):
        self.asked_for += size
        return torch.full((size,), 255, dtype=torch.uint8)

    def on_host(self, tensor):
        self.here += 1
        return tensor.detach().clone()

    def brought(self, tensor):
        self.there += 1
        return tensor.clone()
