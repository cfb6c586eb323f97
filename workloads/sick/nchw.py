"""ResNet-50 in bfloat16 and NCHW."""

import torch
import torchvision
from common import DEVICE, Fixed, main
from torch import nn


def build(cures, tiny):
    with torch.device(DEVICE):
        model = (torchvision.models.resnet18 if tiny else torchvision.models.resnet50)(
            num_classes=10
        )
        dtype = torch.float32 if tiny else torch.bfloat16
        model.to(DEVICE, dtype)
        shape = (2, 3, 32, 32) if tiny else (128, 3, 224, 224)
        batches = Fixed(torch.randn(shape, dtype=dtype), torch.arange(shape[0]) % 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loss = nn.functional.cross_entropy
    return model, batches, lambda output, batch: loss(output.float(), batch[1]), optimizer


if __name__ == "__main__":
    main(build, "channels-last")
