from pathlib import Path
def show_report(path, plot=None):
    print(path)
