"""Which towers can be loaded: the ``model_type`` values of their configs."""

MODEL_TYPES = {
    "dinov2": "DINOv2: any size, native aspect ratio; pool cls or mean. Executed on a CPU; never on a GPU.",
}
