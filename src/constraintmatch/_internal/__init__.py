"""What every room uses: errors, safe writing of files, progress, and draws that are the same everywhere."""
