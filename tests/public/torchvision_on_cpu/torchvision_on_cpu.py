"""``torchvision::nms`` in Python: what the import of torchvision needs, and detection models in evaluation."""

import torch


def define() -> None:
    """Called by torch when its import ends. With a CUDA build of torch, torchvision brings the operator itself."""
    if torch.version.cuda is None:
        for name in ("torchvision::nms", "torchvision::qnms"):  # the second is that of quantized boxes
            torch.library.define(name, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch.library.impl("torchvision::nms", "CPU")(nms)


def nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Non-maximum suppression: the boxes that no better one covers, best first."""
    order = scores.argsort(descending=True, stable=True).tolist()
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept: list[int] = []
    gone = torch.zeros(len(order), dtype=torch.bool)
    for index in order:
        if gone[index]:
            continue
        kept.append(index)
        corner = torch.maximum(boxes[index, :2], boxes[:, :2])
        size = (torch.minimum(boxes[index, 2:], boxes[:, 2:]) - corner).clamp(min=0)
        common = size[:, 0] * size[:, 1]
        gone |= common / (areas[index] + areas - common) > threshold
    return torch.tensor(kept, dtype=torch.long)
