"""Tests of one room at a time; each folder is named after the room that it tests."""
