"""Fine-tuning of the slide encoder on labels of slides or patients."""
