"""Answers as COCO detections and their average precision."""
