"""Where step records can be copied to: JSONL, TensorBoard, Weights & Biases, MLflow, Prometheus."""
